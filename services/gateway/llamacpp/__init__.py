"""Endpoints of llama.cpp's server beside OpenAI's API."""

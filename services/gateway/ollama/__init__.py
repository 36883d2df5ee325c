"""Ollama's API: its request models, their translation to requests of OpenAI's API, and its responses."""

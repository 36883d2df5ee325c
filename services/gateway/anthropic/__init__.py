"""Anthropic's Messages API: its request models, their translation to chat requests, and its responses."""

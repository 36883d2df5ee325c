"""OpenAI's API: request schemas, chat prompts, tools and response encoding."""

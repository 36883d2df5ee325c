"""The gateway: HTTP for clients that speak OpenAI's API, towards the run a client like any other."""

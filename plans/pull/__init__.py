"""Makes packages from models at a hub, and from model files on this disk."""

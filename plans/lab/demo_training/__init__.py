"""How the demo model was trained."""

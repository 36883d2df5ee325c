"""All messages, one file for each side that receives them; links.py says which may travel where."""

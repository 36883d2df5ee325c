"""The command line: verbs and their parsers, option values, the settings file, former and foreign spellings."""

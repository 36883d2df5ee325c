"""Facts about a device: its cores, its limits, its temperature and its device profile."""

"""Facts about a device: its cores, limits, temperature and device profile."""

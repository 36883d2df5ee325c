"""The loader, the only process that reads neurons from flash."""

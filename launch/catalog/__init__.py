"""Estimates of the models of the catalog on a device, their order and table, and the offer of a first model."""

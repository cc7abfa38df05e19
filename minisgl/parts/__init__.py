"""Features that take part in steps: a folder each, with a host half and a device half."""

"""Random programs on DTensors beside the same programs on one device."""

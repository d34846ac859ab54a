"""Random programs on DTensors, compared with the same programs on one device."""

"""How ranks exchange data: collectives over threads, processes and the frameworks' own groups."""

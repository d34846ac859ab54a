"""One file per facet of a platform: what core and trainers ask of a framework."""

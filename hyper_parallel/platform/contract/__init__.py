"""The interface of a platform, which core and trainers use: one file per facet."""

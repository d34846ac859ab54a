"""A team's checks, named in pyproject.toml: read, run one after the other, and reported for CI."""

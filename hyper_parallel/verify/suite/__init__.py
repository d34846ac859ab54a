"""A team's checks from pyproject.toml: read, run one after the other, and reported for CI."""

"""The platform contract as checks: every member, its documented errors included, on any framework and transport."""

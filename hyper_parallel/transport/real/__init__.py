"""Real ranks: processes that communicate; their launch, and the requests that their coordinator serves."""

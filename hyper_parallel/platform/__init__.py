"""One contract over the frameworks, and the choice among them."""

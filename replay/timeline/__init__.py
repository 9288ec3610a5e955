"""What happened to one trajectory: a model of it, a terminal view and a page."""

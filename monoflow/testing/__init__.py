"""What keeps every room honest: checks by execution."""

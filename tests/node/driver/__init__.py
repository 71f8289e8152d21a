"""The duties, each against the world in memory and on a mock clock."""

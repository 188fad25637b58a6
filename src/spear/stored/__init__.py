"""Files from others, read without running anything in them, in memory that their size bounds."""

"""What people look at: the demo, its pictures and its page."""

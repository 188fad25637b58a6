"""`spear bench`: how large a batch comes back exactly, from how wide a layer, in what time."""

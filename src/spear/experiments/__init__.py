"""One file per table or figure of the paper; `common` is what they share, `bench` is `spear bench`."""

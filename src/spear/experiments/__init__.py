"""One file per table or figure, the paper's and our own; `common` holds what they share."""

"""One file per table or figure of the paper, and of ours; `common` is what they share."""

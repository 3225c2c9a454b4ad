"""Named connection settings of the command line, and `kvstore context`, which edits them."""

"""Generated variants of what comes from elsewhere, each compared with the package that it comes from."""

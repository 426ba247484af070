"""Split text into words, and encode words as token ids."""

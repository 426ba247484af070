"""Element types, a room for each family: what a type is stands there and nowhere else. `dtypes` lists them."""

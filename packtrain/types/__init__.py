"""Element types, one module for each family, with everything about its types. `dtypes` lists them."""

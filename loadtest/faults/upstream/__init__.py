"""A replica that goes wrong on demand: `process` listens, `connection` obeys, `answers` has what is well."""

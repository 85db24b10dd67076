"""All measurements of time or rates, and one table of them: `parts` has the measurements, `command` runs them."""

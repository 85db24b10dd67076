"""All that measures time or rates, and one table of it: `parts` names the measurements, `command` runs them."""

"""Quality of forecasts of a prompt's next use, compared with the recorded sessions."""

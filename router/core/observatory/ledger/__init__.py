"""What all requests add up to: by time (timeline), template (branches), kind (groups), difference (losses); and
advice."""

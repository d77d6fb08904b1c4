"""The same work on Twostroke and on what the package registry offers beside it, in turn, as ratios."""

"""The float64 NumPy implementation that everything is compared with. Shares no arithmetic with the rest of `attention`."""

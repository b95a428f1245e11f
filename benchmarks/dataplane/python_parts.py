def measure(report, repeats):
    pass

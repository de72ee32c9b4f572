"""A load generator: requests in an open or a closed loop, measured from the moment they were due.

Pure: histogram, schedule, tally, verdict, result, requests, published, target. They do what they are told and no more:
connection, sender, run. No torch.
"""

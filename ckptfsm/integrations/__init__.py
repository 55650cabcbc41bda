"""The library inside trainers and orchestrators. Each module imports the trainer that it serves.

The rest of the library imports none of these modules.
"""

"""The library inside trainers and orchestrators that people use. Each module imports its own; none is
imported by the rest of the library."""

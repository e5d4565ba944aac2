"""The Python API of the benchmark; `contnorm.bench` exports its public names."""

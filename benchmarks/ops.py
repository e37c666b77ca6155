"""Times of ops at the sizes of Kimi-K3; the same as `k3lib bench`.

python -m benchmarks.ops --op kda_chunk --op mla_decode
"""

from k3lib.server.cli import bench

if __name__ == "__main__":
    bench()

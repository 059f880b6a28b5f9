"""Symmetric memory: regions that every rank of a job can read and add to."""

from .cuda import CudaHeap as CudaHeap
from .heap import SymmetricHeap as SymmetricHeap
from .shm import ApartHeap as ApartHeap
from .shm import SharedMemoryHeap as SharedMemoryHeap

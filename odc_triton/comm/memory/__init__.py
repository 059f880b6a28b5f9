"""Symmetric memory: regions that every rank of a job can read and add to."""

from .apart import ApartHeap as ApartHeap
from .cuda import CudaHeap as CudaHeap
from .heap import SymmetricHeap as SymmetricHeap
from .shm import SharedMemoryHeap as SharedMemoryHeap

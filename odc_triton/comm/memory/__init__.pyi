from .cuda import CudaHeap as CudaHeap
from .heap import ApartHeap as ApartHeap
from .heap import SharedMemoryHeap as SharedMemoryHeap
from .heap import SymmetricHeap as SymmetricHeap

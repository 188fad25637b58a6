"""The datasets that SPEAR reads, and where to get them. SPEAR itself downloads nothing."""

from __future__ import annotations

from spear.data.places import Dataset, Source

CIFAR10 = Dataset(
    "CIFAR-10",
    (
        "cifar-10-batches-py",
        "cifar10/cifar-10-batches-py",
        "CIFAR10/cifar-10-batches-py",
        "cifar10",
        "CIFAR10",
    ),
    ("test_batch", "data_batch_*"),
    "cifar-10-batches-py/test_batch (the python version)",
    Source(
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "curl -L https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz | tar -xz",
    ),
    "most of the paper's experiments, spear bench",
    archives=("cifar-10-python.tar.gz",),
)
MNIST = Dataset(
    "MNIST",
    ("MNIST/raw", "mnist/raw", "MNIST", "mnist"),
    ("t10k-images*", "t10k-labels*", "train-images*", "train-labels*"),
    "MNIST/raw/t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (or with .gz)",
    Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist/ (PyTorch's copy)",
        "for file in t10k-images-idx3 t10k-labels-idx1 train-images-idx3 train-labels-idx1; do "
        "curl -L --create-dirs -o MNIST/raw/$file-ubyte.gz "
        "https://ossci-datasets.s3.amazonaws.com/mnist/$file-ubyte.gz; done",
    ),
    "the main table, attacks during training (with the training set), spear bench",
)
TINY_IMAGENET = Dataset(
    "TinyImageNet",
    (
        "tiny-imagenet-200",
        "tiny-imagenet-200/tiny-imagenet-200",
        "tiny-imagenet",
        "tiny_imagenet",
        "TinyImageNet",
    ),
    ("wnids.txt", "val/val_annotations.txt", "val/images", "val/n[0-9]*", "train/n[0-9]*"),
    "tiny-imagenet-200/val, wnids.txt",
    Source(
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "curl -LO http://cs231n.stanford.edu/tiny-imagenet-200.zip && "
        "unzip -q tiny-imagenet-200.zip",
    ),
    "the main table, depth, optimisation attacks, spear bench",
    own=("wnids.txt", "val/val_annotations.txt"),  # ImageNet has such a val too
    archives=("tiny-imagenet-200.zip",),
)
IMAGENET = Dataset(
    "ImageNet",
    ("imagenet", "ImageNet", "imagenet-1k", "ILSVRC2012"),
    ("val",),
    "imagenet/val with a folder for each class, named 000 to 999 or n01440764 to n15075141",
    Source(
        "https://www.image-net.org/download.php (needs an account: ILSVRC2012_img_val.tar and "
        "ILSVRC2012_devkit_t12.tar.gz, put into imagenet/)",
        "python -c \"from torchvision.datasets import ImageNet; ImageNet('imagenet', 'val')\"",
    ),
    "the main table at 224 and 720 pixels, VGG16's features",
    own=("val/[0-9]*", "val/n[0-9]*"),
    foreign=("wnids.txt",),  # TinyImageNet sorted by class
    archives=("ILSVRC2012_img_val.tar", "imagenet/ILSVRC2012_img_val.tar"),
)
ADULT = Dataset(
    "ADULT",
    ("adult", "ADULT", "Adult"),
    ("adult.data", "adult.test"),
    "adult/adult.data and adult/adult.test",
    Source(
        "https://archive.ics.uci.edu/dataset/2/adult",
        "curl -LO https://archive.ics.uci.edu/static/public/2/adult.zip && "
        "unzip -q adult.zip -d adult",
    ),
    "the table of tabular data",
    archives=("adult.zip", "adult/adult.zip"),
)

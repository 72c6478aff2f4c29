#!/bin/sh
sed -i 's/-/+/' add.sh

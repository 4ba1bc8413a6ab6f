data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.id # .name ends with provider 6, .region begins with it
  account   = data.aws_caller_identity.current.account_id

  # Built here rather than read from the bucket, so that a plan shows every policy in full.
  bucket_arn  = local.express ? "arn:${local.partition}:s3express:${local.region}:${local.account}:bucket/${local.bucket_name}" : "arn:${local.partition}:s3:::${local.bucket_name}"
  objects_arn = "${local.bucket_arn}/${var.prefix}/*"

  sse_algorithm = var.kms_key_arn == null ? "AES256" : "aws:kms"

  tags = merge({
    Application = "s3kv"
    ManagedBy   = "terraform"
    DataClass   = "recomputable-cache"
  }, var.tags)

  # The name again, but known only once the bucket is there: what uses it waits.
  bucket = one(concat(aws_s3_bucket.this[*].id, aws_s3_directory_bucket.this[*].bucket))
}

# No versioning: objects are never overwritten and can be computed again, and old versions would
# turn every expiry into storage that is still paid for. A new bucket has none; nothing here turns
# it off if something else turns it on.
resource "aws_s3_bucket" "this" {
  count = local.express ? 0 : 1

  bucket        = local.bucket_name
  force_destroy = var.force_destroy
  tags          = local.tags
}

# Directory buckets can be tagged only with provider 6, and have neither ACLs nor public access.
resource "aws_s3_directory_bucket" "this" {
  count = local.express ? 1 : 0

  bucket        = local.bucket_name
  force_destroy = var.force_destroy

  location {
    name = var.availability_zone_id
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  count = local.express ? 0 : 1

  bucket                  = local.bucket
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  count = local.express ? 0 : 1

  bucket = local.bucket

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = local.bucket

  rule {
    bucket_key_enabled = var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = local.sse_algorithm
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = local.bucket

  rule {
    id     = "expire"
    status = "Enabled"

    filter {
      prefix = "${var.prefix}/"
    }

    expiration {
      days = var.expiration_days
    }
  }

  # s3kv writes every object with one PUT. Other tools may not, and parts are paid for unseen.
  rule {
    id     = "abort-multipart"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }

  depends_on = [aws_s3_bucket_policy.this] # with Express it holds the right to expire
}
